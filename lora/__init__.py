"""Few-step and style adapters: reading every layout, their sampling contracts, applying and merging them."""
