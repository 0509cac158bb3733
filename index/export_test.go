package index

// SetPage bounds the pages of listings: rows, bytes of their values, keys visited.
func (ix *Index) SetPage(rows, bytes, steps int) { ix.limits = limits{rows, bytes, steps} }
