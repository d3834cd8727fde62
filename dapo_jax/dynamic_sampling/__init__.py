"""Which groups are worth training on, and how many rounds it takes to find enough of them."""
