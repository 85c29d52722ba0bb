# SPDX-License-Identifier: Apache-2.0
"""``python -m gpubox.gguf_merge``."""

from .command import main

raise SystemExit(main())
