"""The declarations: every module here has a `FAMILY`, and is found by being here."""
