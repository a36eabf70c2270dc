#!/bin/bash
# Checks each file of deploy/ with a tool that knows its kind; `make deploy-check` brings the tools of deploy/requirements.txt.
# deploy/README.md says what is run for real besides. What only a system has (systemd-analyze) is skipped where it lacks.
set -euo pipefail
cd "$(dirname "$0")"

shellcheck --severity=style ./*.sh torchrun/*.sh slurm/* ../release/*.sh
for script in ./*.sh torchrun/*.sh slurm/* ../release/*.sh; do bash -n "$script"; done
echo "shell: shellcheck and bash -n pass"

for file in kubernetes/*.yaml; do
    # Several versions of the API: a field that one of them does not know is an error.
    for version in 1.29 1.37; do kubernetes-validate --strict --quiet -k "$version" "$file"; done
done
echo "Kubernetes: every manifest fits the schemas of 1.29 and 1.37"

hadolint docker/Dockerfile
check-jsonschema --quiet --builtin-schema vendor.compose-spec docker/compose.yaml
echo "containers: hadolint passes, and compose.yaml fits the Compose specification"

if command -v systemd-analyze >/dev/null; then
    units=$(mktemp -d)
    trap 'rm -rf "$units"' EXIT
    # systemd-analyze wants the program to be there, and a user that it knows.
    for unit in systemd/*; do
        sed -e 's#^ExecStart=/opt/etha/bin/etha#ExecStart=/bin/true#' -e 's#^User=etha#User=daemon#' "$unit" >"$units/$(basename "$unit")"
    done
    cp "$units/etha-agent@.service" "$units/etha-agent@cpu.service"
    said=$(systemd-analyze verify --man=no "$units/etha-agent@cpu.service" "$units/etha-dashboard.service" 2>&1)
    [ -z "$said" ] || { echo "$said" >&2; exit 1; }
    echo "systemd: systemd-analyze finds nothing"
else
    echo "systemd: no systemd-analyze here, the units were not checked" >&2
fi
