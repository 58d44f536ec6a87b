"""What to do with an inventory: each cluster's split, and the joint round."""
