"""The papers' comparison for one's own model: every system, every workload, tables and figures."""
