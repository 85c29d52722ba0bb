# SPDX-License-Identifier: Apache-2.0
# Every target can be interrupted and run again.
#
# DEMO_SUITE            bookworm (Debian 12, the default) or trixie (Debian 13): the demo's box
# GPUBOX_DEMO_PORT      port on this host's loopback, 18000
# GPUBOX_WHEELHOUSE     directory or URL with wheels for the box; PIP_FIND_LINKS if unset
# GPUBOX_DEBIAN_MIRROR  where Debian's packages come from when no image registry is reachable
# GPUBOX_PYTHON         interpreter for .venv
# GPUBOX_GPU_PYTHON     interpreter that gpu-check tests; that of the current release if unset
# GPUBOX_GPU_TIME       =1: gpu-check also times the kernels and what is served
# KEEP_CACHE            =1: demo-down keeps images and downloaded packages
# SCENARIOS             names of the scenarios that `make test` runs, all if unset
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup toolchain lint unit check kill-gguf bench-gguf test gpu-check demo demo-down demo-status lock

BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
export LC_ALL := C.UTF-8

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20
	@printf '\nvariables (environment):\n'
	@sed -n 's/^# \([A-Z_]* .*\)/  \1/p' Makefile

setup: toolchain ## uv, the locked environment in .venv, podman (by apt as root, else the command is printed)
	@tools/toolchain.sh system

toolchain:
	@tools/toolchain.sh python

demo: setup ## from nothing to a served tiny GLM-5 in the system container gpubox-demo
	@python -m demo up

demo-down: toolchain ## remove everything that `make demo` made (KEEP_CACHE=1 keeps images and downloads)
	@python -m demo down $(if $(KEEP_CACHE),--keep-cache)

demo-status: toolchain ## what the demo serves, or where it stands
	@python -m demo status

lint: toolchain ## ansible-lint (production), yamllint, ruff, mypy
	ruff check
	ruff format --check
	mypy
	yamllint --strict .
	ansible-lint --offline

unit: toolchain ## unit tests
	pytest -q --numprocesses=auto --dist=worksteal -m "not forks"
	pytest -q -m forks

check: toolchain ## lint, types and unit tests, side by side: before every commit
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint unit

kill-gguf: toolchain ## the merger stopped at every call, and 200 times at random ones
	GPUBOX_KILLS=200 pytest -q tests/unit/test_gguf_crashes.py

test: setup check ## everything: check and the scenarios in system containers
	@python -m tests.scenarios

gpu-check: toolchain ## kernels, served logprobs and MTP on this machine's NVIDIA GPU (stop the server first)
	@python tests/gpu/run.py $(if $(GPUBOX_GPU_PYTHON),--python $(GPUBOX_GPU_PYTHON)) $(if $(GPUBOX_GPU_TIME),--time)

bench-gguf: toolchain ## the merger against cat and llama-gguf-split (LLAMA_GGUF_SPLIT=its path, BENCH_DIR=folder with 19 GB)
	PYTHONPATH=plugins/module_utils:. python -m tests.bench.gguf_merge $(or $(BENCH_DIR),/var/tmp)

lock: ## resolve uv.lock anew, with no host in it
	@tools/toolchain.sh lock
