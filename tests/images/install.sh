#!/bin/sh
# Installs what the tests of the images take from Debian: Docker, Compose, and debootstrap for a base image.
set -eu
packages=
for pair in dockerd:docker.io docker-compose:docker-compose debootstrap:debootstrap; do
    command -v "${pair%%:*}" >/dev/null || packages="$packages ${pair##*:}"
done
if [ -n "$packages" ]; then
    echo "installing from Debian:$packages"
    apt-get update -qq
    # shellcheck disable=SC2086
    apt-get install -qq -y --no-install-recommends $packages >/dev/null
fi
