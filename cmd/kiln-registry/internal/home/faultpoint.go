//go:build !chaos

package home

import "github.com/kiln-registry/kiln-registry/index"

// breakable returns the engine as it is. A program built with the tag chaos can be told to break here.
func breakable(kv index.KV) index.KV { return kv }
