"""What each kind of speculative decoding brings: workloads, measuring, statistics, reports."""
