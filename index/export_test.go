package index

// SetPage bounds the pages of listings: rows, bytes of their values, keys visited.
func (ix *Index) SetPage(rows, bytes, steps int) { ix.limits = limits{rows, bytes, steps} }

// Format is the version of the key layout.
const Format = formatVersion

// Seal turns a body into the value of a key.
func Seal(key, body string) []byte { return seal([]byte(key), []byte(body)) }
