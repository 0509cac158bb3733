package access

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// ParseFile reads a token file and checks all of it. Its errors are one line and say where the fault is, what it is and
// what is allowed.
func ParseFile(b []byte) (File, error) {
	root, err := document(b)
	if err != nil {
		return File{}, err
	}
	var f File
	err = mapping(root, "the file", members{
		"version": f.readVersion,
		"anonymous": func(n *yaml.Node) (err error) {
			f.Anonymous, err = list(n, "anonymous", readRule)
			return err
		},
		"tokens": func(n *yaml.Node) (err error) {
			f.Tokens, err = list(n, "tokens", readToken)
			return err
		},
	})
	if err != nil {
		return File{}, err
	}
	_, err = f.compile()
	return f, err
}

// document returns the root of the only YAML document of a file.
func document(b []byte) (*yaml.Node, error) {
	dec := yaml.NewDecoder(bytes.NewReader(b))
	var doc yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, fmt.Errorf("empty: want version: %d and tokens", FileVersion)
	case err != nil:
		return nil, syntax(err)
	}
	if len(doc.Content) != 1 {
		return nil, errors.New("want one mapping")
	}
	switch err := dec.Decode(new(yaml.Node)); {
	case err == nil:
		return nil, errors.New("more than one YAML document: want one")
	case !errors.Is(err, io.EOF):
		return nil, syntax(err)
	}
	return doc.Content[0], nil
}

func syntax(err error) error {
	text := strings.TrimPrefix(strings.Join(strings.Fields(err.Error()), " "), "yaml: ")
	return fmt.Errorf("not YAML: %s", text)
}

// members are the names that a mapping may have, with what reads the value of each.
type members map[string]func(*yaml.Node) error

func at(n *yaml.Node, format string, args ...any) error {
	return fmt.Errorf("line %d: %s", n.Line, fmt.Sprintf(format, args...))
}

// target follows an alias to what it stands for.
func target(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

func mapping(n *yaml.Node, what string, m members) error {
	n = target(n)
	if n.Kind != yaml.MappingNode {
		return at(n, "%s: want %s", what, m)
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		read, ok := m[key.Value]
		switch {
		case !ok || key.Kind != yaml.ScalarNode:
			return at(key, "%q is unknown in %s: want %s", key.Value, what, m)
		case seen[key.Value]:
			return at(key, "%q occurs twice in %s", key.Value, what)
		}
		seen[key.Value] = true
		if err := read(value); err != nil {
			return err
		}
	}
	return nil
}

// String lists the names in the order that the format documents.
func (m members) String() string {
	var names []string
	for _, name := range []string{
		"version", "anonymous", "tokens", "name", "sha256", "expires", "allow", "repositories", "actions",
	} {
		if m[name] != nil {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// list reads a sequence; an empty value is an empty one.
func list[T any](n *yaml.Node, what string, read func(*yaml.Node) (T, error)) ([]T, error) {
	n = target(n)
	if isNull(n) {
		return nil, nil
	}
	if n.Kind != yaml.SequenceNode {
		return nil, at(n, "%s: want a list", what)
	}
	var out []T
	for _, c := range n.Content {
		v, err := read(c)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}

func readText(what string) func(*yaml.Node) (string, error) {
	return func(n *yaml.Node) (string, error) {
		if n = target(n); n.Kind != yaml.ScalarNode || isNull(n) || n.ShortTag() == "!!binary" {
			return "", at(n, "%s: want a text", what)
		}
		return n.Value, nil
	}
}

func (f *File) readVersion(n *yaml.Node) error {
	if n = target(n); n.Kind != yaml.ScalarNode || n.ShortTag() != "!!int" || n.Decode(&f.Version) != nil {
		return at(n, "version: want %d", FileVersion)
	}
	return nil
}

func readToken(n *yaml.Node) (t Token, err error) {
	err = mapping(n, "a token", members{
		"name":   func(n *yaml.Node) (err error) { t.Name, err = readText("name")(n); return err },
		"sha256": func(n *yaml.Node) (err error) { t.SHA256, err = readText("sha256")(n); return err },
		"expires": func(n *yaml.Node) error {
			// An empty value is refused: it would make a token valid for ever that was meant to end.
			if n = target(n); n.Kind != yaml.ScalarNode || isNull(n) || n.Decode(&t.Expires) != nil || t.Expires.IsZero() {
				return at(n, "expires: want a time, as %s", time.Date(2030, 1, 31, 12, 0, 0, 0, time.UTC).Format(time.RFC3339))
			}
			return nil
		},
		"allow": func(n *yaml.Node) (err error) { t.Allow, err = list(n, "allow", readRule); return err },
	})
	return t, err
}

func readRule(n *yaml.Node) (r Rule, err error) {
	err = mapping(n, "a rule", members{
		"repositories": func(n *yaml.Node) (err error) {
			r.Repositories, err = list(n, "repositories", readText("repositories"))
			return err
		},
		"actions": func(n *yaml.Node) (err error) {
			r.Actions, err = list(n, "actions", readAction)
			return err
		},
	})
	return r, err
}

func readAction(n *yaml.Node) (Action, error) {
	text, err := readText("actions")(n)
	return Action(text), err
}
