#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Facts of the box, each a value or unknown."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hardware_facts
short_description: Facts of the box, each a value or unknown
description:
  - Reads the box through commands on PATH (lspci, nvidia-smi, dpkg-query, uname) and files below
    O(root). A tool that is missing or fails makes its facts unknown and never fails the module.
options:
  root:
    description: Directory that holds C(proc), C(sys) and C(etc). Another one is a recorded state.
    type: path
    default: /
attributes:
  check_mode: {support: full, description: Nothing is ever changed.}
  diff_mode: {support: none, description: Nothing is ever changed.}
author: [gpubox]
"""

EXAMPLES = r"""
- name: The facts of the box are known
  hardware_facts:
  register: box
  check_mode: false

- name: Say how many cards there are
  ansible.builtin.debug:
    msg: "{{ box.hardware.nvidia_devices.value | length }}"
  when: box.hardware.nvidia_devices.unknown is none
"""

RETURN = r"""
hardware:
  description:
    - The facts by name, each with C(value), C(unknown) (the reason why there is no value) and
      C(source).
    - C(nvidia_devices) and C(nvswitch_devices) list address, class, device_id, name and revision
      (C(ff) when a device does not answer any more) of what is on the PCI bus.
    - C(gpus) lists index, address, name, uuid, memory_total_mib, memory_used_mib,
      compute_capability, driver_version, pcie_generation, pcie_width (each also with C(_max)),
      ecc_current, ecc_pending, mig_current and mig_pending (enabled or disabled) of what nvidia-smi
      sees; null where it does not say. C(nvidia_smi_messages) is what it says besides,
      C(driver_gpus) the addresses that the loaded module has.
    - C(gpu_processes) lists address, pid, name and memory_used_mib of what holds memory of a card;
      C(gpu_links) maps address to address to class (nvlink, pcie_switch, pcie_socket or
      pcie_cross_socket).
    - C(kernel_boot) is the newest kernel in /boot, C(dkms) lists module, version, kernel and state,
      C(module_installed) is version, flavour and signer of the module that would be loaded now,
      C(secure_boot) whether the firmware refuses modules of unknown signers.
    - C(driver_loaded) and C(driver_flavour) (open or proprietary) are of the loaded module,
      C(driver_installed) is the version of the installed libraries, C(driver_packages) all packages
      of the driver.
    - C(kernel_running), C(architecture), C(os_release) (its assignments).
    - C(cpu_count), C(memory_total_bytes) and C(memory_available_bytes) are within the limits of the
      control groups.
  type: dict
  returned: always
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpubox.hardware import Box


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={"root": {"type": "path", "default": "/"}}, supports_check_mode=True
    )
    module.exit_json(changed=False, hardware=Box(Path(module.params["root"])).facts())


if __name__ == "__main__":
    main()
