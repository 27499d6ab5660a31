#!/bin/sh
# Installs what `make clients` runs: install.sh PYTHON FOLDER. Each client of requirements.txt gets
# an environment of its own, as they do not agree on what they depend on.
set -eu
python=$1
folder=$2
here=$(dirname "$0")

while read -r requirement; do
    name=${requirement%%[=[]*}
    echo "installing $requirement"
    "$python" -m venv "$folder/$name"
    "$folder/$name/bin/python" -m pip --disable-pip-version-check -q install \
        -c "$here/../../constraints.txt" $requirement
done < "$here/requirements.txt"
npm install --prefix "$folder/npm" --no-save --no-package-lock --no-audit --no-fund --loglevel=error \
    openai@7.57.0 @grpc/grpc-js@1.14.7 @grpc/proto-loader@0.8.1
