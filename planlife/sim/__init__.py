"""What PlanManager would do with an engine's traffic, before it is deployed: the real manager over recorded steps."""
