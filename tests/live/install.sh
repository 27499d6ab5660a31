#!/bin/sh
# What `make test-live` needs, from Debian. Where systemd runs, Debian starts both on their usual ports; tests use others.
set -eu
for command in prometheus promtool prometheus-alertmanager; do
    if ! command -v "$command" > /dev/null; then
        echo "installing Debian's prometheus and prometheus-alertmanager"
        apt-get update -q
        apt-get install -yq --no-install-recommends prometheus prometheus-alertmanager
        break
    fi
done
