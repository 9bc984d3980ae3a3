"""Pages to look at: one HTML file each that needs nothing else, light, dark or on paper."""
