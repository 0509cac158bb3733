package resident

import (
	"encoding/json"
	"strconv"
)

// Config is what the debug state tells of a model's config.json. A member is nil where the file has none.
type Config struct {
	Layers    *uint64 `json:"num_layers"`
	Heads     *uint64 `json:"num_attention_heads"`
	KVHeads   *uint64 `json:"num_kv_heads"`
	Positions *uint64 `json:"max_position_embeddings"`
}

// fileConfig is config.json with the names that model libraries use.
type fileConfig struct {
	Layers    count       `json:"num_hidden_layers"`
	Heads     count       `json:"num_attention_heads"`
	KVHeads   count       `json:"num_key_value_heads"`
	Positions count       `json:"max_position_embeddings"`
	Text      *fileConfig `json:"text_config"` // of a model for text and images
}

// count is a number, or nil for whatever else stands there.
type count struct{ n *uint64 }

func (c *count) UnmarshalJSON(b []byte) error {
	if n, err := strconv.ParseUint(string(b), 10, 64); err == nil {
		c.n = &n
	}
	return nil
}

// ParseConfig reads a config.json. It is for people only: what is not there or of another type is left out.
func ParseConfig(b []byte) Config {
	var f fileConfig
	_ = json.Unmarshal(b, &f) // a member of another type leaves the others readable
	if f.Layers.n == nil && f.Text != nil {
		f = *f.Text
	}
	if f.KVHeads.n == nil {
		f.KVHeads = f.Heads // without grouping every head has its own
	}
	return Config{f.Layers.n, f.Heads.n, f.KVHeads.n, f.Positions.n}
}
