# SPDX-License-Identifier: Apache-2.0
"""Pure functions of gpubox: parsers, planners and transactions, without Ansible."""
