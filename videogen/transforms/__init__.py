"""Work that H3 need not do twice, each part attached inside a scope and gone after it; knows no recipe by name."""
