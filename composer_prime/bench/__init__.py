"""What `composer-prime bench` measures: medians and ratios of the parts whose speed we promise."""
