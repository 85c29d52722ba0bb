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
  paths:
    description: Paths whose file systems matter; they need not exist.
    type: list
    elements: str
    default: []
  samples:
    description:
      - Files below O(root) to measure the rate of their disk with. The first of 64 MiB or more is
        read, at most 256 MiB and for at most 0.3 s; nothing is written.
    type: list
    elements: str
    default: []
  packages:
    description: System packages that will be installed; apt is asked what that would do.
    type: list
    elements: str
    default: []
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
    - C(gpu_processes) lists address, pid, kind (C, G or C+G, for compute and graphics), name and
      memory_used_mib of what holds memory of a card; C(driver_cuda_max) is the highest CUDA version
      that the loaded driver serves (no toolkit);
      C(gpu_links) maps address to address to class (nvlink, pcie_switch, pcie_socket or
      pcie_cross_socket).
    - C(kernel_boot) is the newest kernel in /boot, C(dkms) lists module, version, kernel and state,
      C(module_installed) is version, flavour and signer of the module that would be loaded now,
      C(secure_boot) whether the firmware refuses modules of unknown signers.
    - C(driver_loaded) and C(driver_flavour) (open or proprietary) are of the loaded module,
      C(driver_installed) is the version of the installed libraries, C(driver_packages) all packages
      of the driver.
    - C(kernel_messages) are the driver's last lines in the kernel's log, C(other_drivers) the
      loaded modules that take the cards from it (nouveau, nvidiafb).
    - C(kernel_running), C(architecture), C(os_release) (its assignments).
    - C(cpu_count), C(memory_total_bytes) and C(memory_available_bytes) are within the limits of the
      control groups, C(control_groups) is their version, memory_bytes and cpus (null for no limit).
    - C(numa_nodes) lists node, cpus (those that may be used, such as C(0-31)) and
      memory_total_bytes; each of C(nvidia_devices) has its numa_node (null where the box does not
      say).
    - C(iommu) is C(off), C(on) (it translates the addresses of the cards) or C(passthrough);
      C(acs_redirecting) lists the bridges that send requests between cards up to the root.
    - C(cuda_toolkits) lists toolkit (as in its folder's name), version and compiler (whether nvcc
      is there), C(container) is the kind of container, C(none) on a machine of its own.
    - C(cuda_link) is kind (none, directory, link or alternative) and target of C(/usr/local/cuda),
      and whether the system has an alternative of that name.
    - C(apt_holds) lists packages on hold, C(apt_pins) packages (patterns), pin and priority of the
      preferences, C(unattended_upgrades) is enabled and spared (what they leave out).
    - C(packages_missing) are those of O(packages) that are not there, C(apt_simulation) lists
      action (install, change or remove), package, old and new version of what apt would do for
      them.
    - C(paths) maps each of O(paths) to mount, device, number, file_system, size_bytes, free_bytes,
      read_only, noexec, reflink and rotational (null where nothing says).
    - C(read_speeds) maps the sample that was read to bytes a second.
  type: dict
  returned: always
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpubox.hardware import Box


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/"},
            "paths": {"type": "list", "elements": "str", "default": []},
            "samples": {"type": "list", "elements": "str", "default": []},
            "packages": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    given = module.params
    box = Box(
        Path(given["root"]),
        paths=given["paths"],
        samples=given["samples"],
        packages=given["packages"],
    )
    module.exit_json(changed=False, hardware=box.facts())


if __name__ == "__main__":
    main()
