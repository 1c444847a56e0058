"""Who says how running sequences may go on: proposers of drafts, and what checks them."""
