package safetensors

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

// MaxIndex is the largest index document that is read, in bytes: Kiln's limit.
const MaxIndex = 64 << 20

// readIndex returns the distinct file names that the index document names, sorted.
func readIndex(e Entry, read func() ([]byte, error)) ([]string, error) {
	switch {
	case e.Mode == Symlink:
		return nil, refuseLink(e)
	case e.Mode != Regular:
		return nil, refuseFile(CodeNotRegular, IndexName, "not a regular file")
	case e.Size > MaxIndex:
		return nil, indexTooLarge(e.Size)
	}
	data, err := read()
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", IndexName, err)
	}
	return parseIndex(data)
}

func indexTooLarge(size int64) error {
	return refuseFile(CodeIndexTooLarge, IndexName, "%d bytes, at most %d are read", size, MaxIndex)
}

// parseIndex returns the distinct values of weight_map, sorted. It does not look at what they say.
func parseIndex(data []byte) ([]string, error) {
	if int64(len(data)) > MaxIndex {
		return nil, indexTooLarge(int64(len(data)))
	}
	names := map[string]struct{}{}
	err := strictjson.Read(data, func(r *strictjson.Reader) error {
		return r.Object(func(member string) error {
			if member != "weight_map" {
				return r.Skip()
			}
			return readWeightMap(r, names)
		})
	})
	if err == nil && len(names) == 0 {
		err = refuseFile(CodeIndexEmpty, IndexName, "weight_map is missing or names no files")
	}
	if err != nil {
		return nil, indexFault(data, err)
	}
	return slices.Sorted(maps.Keys(names)), nil
}

func readWeightMap(r *strictjson.Reader, names map[string]struct{}) error {
	if k := r.Kind(); k != strictjson.Object && k != strictjson.Invalid {
		return refuseFile(CodeIndexWeightMap, IndexName, "weight_map is %v, must be an object", k)
	}
	return r.Object(func(tensor string) error {
		if k := r.Kind(); k != strictjson.String && k != strictjson.Invalid {
			return refuseFile(CodeIndexWeightMap, IndexName, "weight_map gives %v for tensor %+.80q, must be a file name", k,
				tensor)
		}
		name, err := r.String()
		if err != nil {
			return err
		}
		if names[name] = struct{}{}; len(names) > identity.MaxShards {
			return refuseFile(CodeTooManyShards, IndexName, "weight_map names more than %d files", identity.MaxShards)
		}
		return nil
	})
}

// indexFault turns a fault of the JSON into an *Error, and says so when the document is something else altogether.
func indexFault(data []byte, err error) error {
	if _, ok := errors.AsType[*strictjson.Error](err); !ok {
		return err
	}
	if other := Diagnose(data[:min(len(data), diagnoseLen)]); other != nil {
		if e, ok := errors.AsType[*Error](other); ok {
			return refuseFile(CodeIndexNotJSON, IndexName, "%s", e.Msg)
		}
	}
	return refuseFile(CodeIndexNotJSON, IndexName, "%v", err)
}
