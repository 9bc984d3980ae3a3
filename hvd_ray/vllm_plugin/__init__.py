"""Hybrid verified decoding inside vLLM: an installable plugin, no fork.

`plugin.register` is vLLM's entry point. It hooks some places of vLLM (`compat.py` names them all)
and does nothing unless the engine's `additional_config` has a section `hvd`.
"""
