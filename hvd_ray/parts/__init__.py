"""What systems need besides a target: where predictor, costs, head and slim model are found."""
