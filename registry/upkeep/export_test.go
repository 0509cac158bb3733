package upkeep

// SetRound sets how many blobs are looked at together; 0: the default.
func (c *Collector) SetRound(n int) { c.round = n }
