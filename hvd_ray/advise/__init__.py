"""`hvd advise`: what speculative decoding would bring a team's own traffic, told from its logs."""
