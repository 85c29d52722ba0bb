# SPDX-License-Identifier: Apache-2.0
"""A tiny but true GLM-5 as GGUF shards: real names, shape rules and quantisation types, no meaning.

It stands in for the 402 GB model wherever a machine has no GPU. Everything is a pure function of
the seed: two runs give equal bytes, on any processor.
"""
