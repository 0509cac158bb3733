package identity

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
)

// checkSpaced checks that what Parse made of a text does not depend on the white space in its shards.
func checkSpaced(t *testing.T, data []byte, m Manifest, err error) {
	t.Helper()
	spaced, serr := Parse(bytes.ReplaceAll(data, []byte(`{"filename":`), []byte(`{ "filename" : `)))
	if !reflect.DeepEqual(spaced, m) {
		t.Fatalf("with spaces %v, without %v", spaced, m)
	}
	var e, se *Error
	if errors.As(err, &e) != errors.As(serr, &se) || e != nil && (e.Rule != se.Rule || e.Shard != se.Shard) {
		t.Fatalf("with spaces %v, without %v", serr, err)
	}
}

// Each is what stands in the place of a good shard up to its digest.
func TestCompactShards(t *testing.T) {
	const name, size, sum = `{"filename":"model-00002-of-00003.safetensors"`, `,"size_bytes":2`, `,"sha256":"sha256:`
	valid := generate(3)
	if !bytes.Contains(valid, []byte(name+size+sum)) {
		t.Fatalf("no %s in %s", name+size+sum, valid)
	}
	for shard, taken := range map[string]bool{
		name + size + sum: true,
		`{"size_bytes":2,"filename":"model-00002-of-00003.safetensors"` + sum:             true,
		`{"filename":"model-00002-of-\u00300003.safetensors"` + size + sum:                true,
		name + `,"size_bytes":0` + sum:                                                    false,
		name + `,"size_bytes":02` + sum:                                                   false,
		name + `,"size_bytes":-2` + sum:                                                   false,
		name + `,"size_bytes":2.0` + sum:                                                  false,
		name + `,"size_bytes":2e0` + sum:                                                  false,
		name + `,"size_bytes":` + sum:                                                     false,
		name + `,"size_bytes":18446744073709551615` + sum:                                 false,
		name + `,"size_bytes":18446744073709551616` + sum:                                 false,
		name + `,"size_bytes":36893488147419103234` + sum:                                 false,
		name + size + size + sum:                                                          false,
		name + size + `,"filename":""` + sum:                                              false,
		name + size + `,"sha256":"sha256:A`:                                               false,
		name + size + `,"sha256":"SHA256:`:                                                false,
		name + size + `,"sha256":"`:                                                       false,
		name + sum:                                                                        false,
		`{"filename":"model-00001-of-00003.safetensors"` + size + sum:                     false,
		`{"filename":"model-00002-of-00003.Safetensors"` + size + sum:                     false,
		`{"filename":"` + strings.Repeat("m", MaxFilename) + `.safetensors"` + size + sum: false,
		`{"filename":"model-00002\tof-00003.safetensors"` + size + sum:                    false,
		"{\"filename\":\"model-00002\tof-00003.safetensors\"" + size + sum:                false,
		"{\"filename\":\"model-00002\xffof-00003.safetensors\"" + size + sum:              false,
		`{"filename":"model-00002é.safetensors"` + size + sum:                             false,
		`{"filename":""` + size + sum:                                                     false,
		`{"filename":null` + size + sum:                                                   false,
		`{"filename":`:                                                                    false,
	} {
		data := bytes.Replace(valid, []byte(name+size+sum), []byte(shard), 1)
		m, err := Parse(data)
		if (err == nil) != taken {
			t.Errorf("%s: %v", shard, err)
		}
		checkSpaced(t, data, m, err)
	}
	for n := range valid {
		m, err := Parse(valid[:n])
		if err == nil {
			t.Errorf("the first %d bytes are taken", n)
		}
		checkSpaced(t, valid[:n], m, err)
	}
}
