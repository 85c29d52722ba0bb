# SPDX-License-Identifier: Apache-2.0
# Every target can be interrupted and run again.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup toolchain lint unit check test demo demo-down demo-status lock

BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
export LC_ALL := C.UTF-8

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

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
	pytest -q

check: lint unit ## lint, types and unit tests: before every commit

test: setup check ## everything: check and the scenarios in system containers
	python -m molecule_runner

lock: ## resolve uv.lock anew, with no host in it
	@tools/toolchain.sh lock
