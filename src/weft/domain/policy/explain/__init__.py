"""Explanations of policy: why a flow is allowed or denied, and what a change would newly allow or deny."""
