package settings

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/kiln-registry/kiln-registry/internal/cli"
)

const maxFile = 1 << 20 // bytes of a file of settings

// entry is a key of a file with its value.
type entry struct {
	at     string // path and line
	values []string
	list   bool
}

// set gives a flag the value. Only a flag that takes a list takes one.
func (e entry) set(v pflag.Value) error {
	list, ok := v.(pflag.SliceValue)
	switch {
	case ok && e.list:
		return list.Replace(e.values)
	case e.list:
		return errors.New("want one value, not a list")
	}
	return v.Set(e.values[0])
}

// readFile reads a file of settings. Its errors start with the path.
func readFile(path string, names []string) (map[string]entry, error) {
	b, err := read(path)
	var system *os.PathError
	switch {
	case errors.As(err, &system):
		return nil, cli.Hint(fmt.Errorf("--%s: %w", Config, err), "--"+Config+" must name a file that this user can read")
	case err != nil:
		return nil, cli.Exit(cli.CodeBadInput, err)
	}
	values, err := parse(path, b, names)
	return values, cli.Exit(cli.CodeBadInput, err)
}

func read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(b) > maxFile {
		err = fmt.Errorf("%s: larger than %d bytes", path, maxFile)
	}
	return b, err
}

// parse reads the text of a file: one mapping from names to a value, or to a list of values, or nothing at all.
func parse(path string, b []byte, names []string) (map[string]entry, error) {
	dec := yaml.NewDecoder(bytes.NewReader(b))
	var doc yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, syntax(path, err)
	}
	switch err := dec.Decode(new(yaml.Node)); {
	case err == nil:
		return nil, fmt.Errorf("%s: more than one YAML document: want one", path)
	case !errors.Is(err, io.EOF):
		return nil, syntax(path, err)
	}
	root := doc.Content[0]
	if root.Kind == yaml.ScalarNode && root.ShortTag() == "!!null" {
		return nil, nil
	}
	if root.Kind != yaml.MappingNode {
		return nil, fault(path, root, "want settings, as addr: 127.0.0.1:5000")
	}
	return entries(path, root, names)
}

func entries(path string, root *yaml.Node, names []string) (map[string]entry, error) {
	values := map[string]entry{}
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		if key.Kind != yaml.ScalarNode {
			return nil, fault(path, key, "want the name of a setting")
		}
		near := nearest(key.Value, names)
		if key.Value != near {
			return nil, fault(path, key, "%q is no setting; the nearest is %s", key.Value, near)
		}
		if was, twice := values[near]; twice {
			return nil, fault(path, key, "%s is set twice, first at %s", near, was.at)
		}
		e, err := readValue(value)
		if err != nil {
			return nil, fault(path, value, "%s: %v", near, err)
		}
		e.at = fmt.Sprintf("%s line %d", path, key.Line)
		values[near] = e
	}
	return values, nil
}

// readValue reads the value of one key. Aliases and tags of YAML's own are no values.
func readValue(n *yaml.Node) (e entry, err error) {
	items := []*yaml.Node{n}
	if n.Kind == yaml.SequenceNode {
		e.list, items = true, n.Content
	}
	for _, item := range items {
		if item.Kind != yaml.ScalarNode || item.Anchor != "" || item.Style&yaml.TaggedStyle != 0 {
			return e, errors.New("want a plain value, or a list of such values")
		}
		if item.ShortTag() == "!!null" {
			return e, errors.New("has no value; leave it out for the default")
		}
		e.values = append(e.values, item.Value)
	}
	return e, nil
}

func fault(path string, n *yaml.Node, format string, args ...any) error {
	return fmt.Errorf("%s line %d: %s", path, n.Line, fmt.Sprintf(format, args...))
}

// syntax makes an error of the decoder one line.
func syntax(path string, err error) error {
	text := strings.TrimPrefix(strings.Join(strings.Fields(err.Error()), " "), "yaml: ")
	return fmt.Errorf("%s: not YAML: %s", path, text)
}
