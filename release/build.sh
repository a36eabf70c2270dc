#!/bin/bash
# Builds the source distribution, and from it the wheel, into dist/, and checks both. Usage: release/build.sh [TAG]
# Run by `make dist` and by the release workflow, with the packages of release/requirements.txt on the path.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf dist build/wheel
python -m build --no-isolation --sdist --outdir dist .
# The wheel is made of the source distribution, so that nothing is missing from that.
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
tar -xzf dist/*.tar.gz -C "$sources" --strip-components 1
python -m build --no-isolation --wheel --outdir build/wheel "$sources"
# A package index takes a compiled library only if its wheel says which C library it needs.
python -m auditwheel repair --wheel-dir dist build/wheel/*.whl
python -m twine check --strict dist/*
python release/check.py dist "$@"
