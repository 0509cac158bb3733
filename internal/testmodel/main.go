// Command testmodel writes a model folder of a given size: safetensors shards of deterministic pseudo-random bytes, the
// shard index that names them, and a config.json. The same flags give the same bytes on every machine.
package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	fs := flag.NewFlagSet("testmodel", flag.ContinueOnError)
	size := fs.String("size", "300MB", "bytes of all shards together, with KB, MB, GB or KiB, MiB, GiB")
	shards := fs.Int("shards", 3, "number of shards")
	seed := fs.Uint64("seed", 1, "other seeds give other bytes")
	if err := fs.Parse(args); err != nil {
		return err
	}
	total, err := parseSize(*size)
	if err != nil {
		return err
	}
	if fs.NArg() != 1 || *shards < 1 || total/int64(*shards) < minShard {
		return fmt.Errorf("want one folder and at least %d bytes a shard", minShard)
	}
	return write(fs.Arg(0), total, *shards, *seed)
}

const (
	columns  = 1024           // of every tensor
	rowBytes = 2 * columns    // BF16
	minShard = 4*rowBytes + 1 // room for four tensors of one row
)

var units = []struct {
	name  string
	bytes int64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"", 1}}

func parseSize(s string) (int64, error) {
	for _, u := range units {
		if digits, ok := strings.CutSuffix(s, u.name); ok {
			n, err := strconv.ParseInt(digits, 10, 64)
			if err != nil || n < 1 || n > 1<<62/u.bytes {
				return 0, fmt.Errorf("size %q: want a positive integer and a unit", s)
			}
			return n * u.bytes, nil
		}
	}
	return 0, fmt.Errorf("size %q: unknown unit", s)
}

type shardIndex struct {
	Metadata  map[string]int64  `json:"metadata"`
	WeightMap map[string]string `json:"weight_map"`
}

// write makes the folder dir with shards whose tensor bytes add up to total, rounded down to whole rows.
func write(dir string, total int64, shards int, seed uint64) error {
	if err := os.Mkdir(dir, 0o777); err != nil {
		return err
	}
	index := shardIndex{map[string]int64{"total_size": 0}, map[string]string{}}
	for i := range shards {
		name := fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, shards)
		tensors := plan(i, total/int64(shards))
		for _, t := range tensors {
			index.WeightMap[t.name] = name
			index.Metadata["total_size"] += t.rows * rowBytes
		}
		if err := writeShard(filepath.Join(dir, name), tensors, seed+uint64(i)<<32); err != nil {
			return err
		}
	}
	if err := writeJSON(filepath.Join(dir, "model.safetensors.index.json"), index); err != nil {
		return err
	}
	return writeJSON(filepath.Join(dir, "config.json"), map[string]any{
		"architectures": []string{"TestModel"}, "hidden_size": columns, "torch_dtype": "bfloat16",
	})
}

type tensor struct {
	name string
	rows int64
}

// plan splits the bytes of shard i into four tensors.
func plan(i int, size int64) (ts []tensor) {
	rows := size / rowBytes
	for k, part := range []string{"attn.qkv", "attn.out", "mlp.up", "mlp.down"} {
		n := rows / 4
		if k == 3 {
			n = rows - 3*(rows/4)
		}
		ts = append(ts, tensor{fmt.Sprintf("model.layers.%d.%s.weight", i, part), n})
	}
	return ts
}

func writeShard(path string, ts []tensor, seed uint64) (err error) {
	type entry struct {
		DType   string   `json:"dtype"`
		Shape   [2]int64 `json:"shape"`
		Offsets [2]int64 `json:"data_offsets"`
	}
	header, at := map[string]any{"__metadata__": map[string]string{"format": "pt"}}, int64(0)
	for _, t := range ts {
		end := at + t.rows*rowBytes
		header[t.name] = entry{"BF16", [2]int64{t.rows, columns}, [2]int64{at, end}}
		at = end
	}
	text, err := json.Marshal(header)
	if err != nil {
		return err
	}
	for len(text)%8 != 0 {
		text = append(text, ' ')
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := bufio.NewWriterSize(f, 256<<10)
	w.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(text))))
	w.Write(text)
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	if _, err := io.CopyN(w, rand.NewChaCha8(key), at); err != nil {
		return err
	}
	return w.Flush()
}

func writeJSON(path string, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o666)
}
