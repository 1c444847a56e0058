"""Schemes for a budget of accuracy or bytes: candidates, what each costs, the best of them."""
