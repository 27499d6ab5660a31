#!/bin/sh
# What `make test-live` needs, from Debian. Where systemd runs, Debian starts Prometheus and its Alertmanager on their
# usual ports; tests use others.
set -eu
for command in prometheus promtool prometheus-alertmanager chromium chromedriver; do
    if ! command -v "$command" > /dev/null; then
        echo "installing Debian's prometheus, prometheus-alertmanager and chromium"
        apt-get update -q
        apt-get install -yq --no-install-recommends prometheus prometheus-alertmanager chromium chromium-driver
        break
    fi
done
