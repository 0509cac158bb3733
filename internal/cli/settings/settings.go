// Package settings fills the flags of a command from its command line, from the environment and from a file. The flags
// are the only table: the flag --idle-timeout is the variable KILN_IDLE_TIMEOUT and the key idle-timeout.
package settings

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/kiln-registry/kiln-registry/internal/cli"
)

const (
	prefix    = "KILN_"
	byDefault = "default"
)

// The flags that are about settings and are none themselves.
const (
	Config = "config"       // names the file; KILN_CONFIG does too
	Print  = "print-config" // print the settings instead of using them
)

// others are the variables of this prefix that are no flags of a server.
var others = []string{"KILN_TOKEN", "KILN_REGISTRY", variable(Config)}

// variable returns the environment variable of a flag.
func variable(flag string) string {
	return prefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// Settings say where the value of each flag came from.
type Settings struct {
	flags *pflag.FlagSet
	from  map[string]string // by flag: as people are told it
}

// Read gives each flag the first value that it finds: on the command line, which was parsed before, in the environment
// (as os.Environ returns it; a variable that is empty counts as absent), in the file that --config or KILN_CONFIG
// names, else the default. A value that the flag does not take, and a file that has anything else than settings, is an
// error that says where.
func Read(flags *pflag.FlagSet, environ []string) (*Settings, error) {
	env := variables(environ)
	s := &Settings{flags, map[string]string{}}
	values := map[string]entry{}
	if path := configFile(flags, env); path != "" {
		var err error
		if values, err = readFile(path, s.names()); err != nil {
			return nil, err
		}
	}
	return s, s.each(func(f *pflag.Flag) error { return s.fill(f, env, values) })
}

// Environment is Read for the flags of these names alone, with no file.
func Environment(flags *pflag.FlagSet, environ []string, names ...string) (*Settings, error) {
	env := variables(environ)
	s := &Settings{flags, map[string]string{}}
	return s, s.each(func(f *pflag.Flag) error {
		if !slices.Contains(names, f.Name) {
			return nil
		}
		return s.fill(f, env, nil)
	})
}

// variables are those of the prefix that are not empty.
func variables(environ []string) map[string]string {
	env := map[string]string{}
	for _, v := range environ {
		if name, value, _ := strings.Cut(v, "="); strings.HasPrefix(name, prefix) && value != "" {
			env[name] = value
		}
	}
	return env
}

func configFile(flags *pflag.FlagSet, env map[string]string) string {
	if f := flags.Lookup(Config); f != nil && f.Changed {
		return f.Value.String()
	}
	return env[variable(Config)]
}

// each visits the flags that are settings.
func (s *Settings) each(visit func(*pflag.Flag) error) (err error) {
	s.flags.VisitAll(func(f *pflag.Flag) {
		if err == nil && !f.Hidden && f.Name != Config && f.Name != Print && f.Name != "help" {
			err = visit(f)
		}
	})
	return err
}

func (s *Settings) names() (names []string) {
	_ = s.each(func(f *pflag.Flag) error {
		names = append(names, f.Name)
		return nil
	})
	return names
}

// fill finds the value of one flag.
func (s *Settings) fill(f *pflag.Flag, env map[string]string, file map[string]entry) error {
	name := variable(f.Name)
	value, inEnv := env[name]
	e, inFile := file[f.Name]
	switch {
	case f.Changed:
		s.from[f.Name] = "--" + f.Name
		return nil
	case inEnv:
		s.from[f.Name] = name
		return wrong(cli.CodeUsage, name, f, f.Value.Set(value))
	case inFile:
		s.from[f.Name] = e.at
		return wrong(cli.CodeBadInput, e.at+": "+f.Name, f, e.set(f.Value))
	}
	s.from[f.Name] = byDefault
	return nil
}

// wrong says where a value stands that a flag does not take, and what it takes.
func wrong(code int, where string, f *pflag.Flag, err error) error {
	if err == nil {
		return nil
	}
	want := map[string]string{
		"bool": "want true or false", "duration": "want a duration, as 90s or 24h", "int": "want a whole number",
		"int64": "want a whole number", "float64": "want a number",
	}[f.Value.Type()]
	if want == "" {
		return cli.Exit(code, fmt.Errorf("%s: %w", where, err))
	}
	return cli.Exit(code, fmt.Errorf("%s: %s", where, want))
}

// Given says whether the value of a flag is not the default.
func (s *Settings) Given(flag string) bool { return s.from[flag] != byDefault }

// Blame adds to an error that names flags where those were set, if that was not on the command line.
func (s *Settings) Blame(err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	var set []string
	_ = s.each(func(f *pflag.Flag) error {
		from := s.from[f.Name]
		if from != byDefault && from != "--"+f.Name && mentions(text, "--"+f.Name) {
			set = append(set, fmt.Sprintf("--%s is set by %s", f.Name, from))
		}
		return nil
	})
	if len(set) == 0 {
		return err
	}
	return fmt.Errorf("%w (%s)", err, strings.Join(set, "; "))
}

// mentions says whether a flag stands in a text, and not only as the start of a longer one.
func mentions(text, flag string) bool {
	for {
		_, rest, found := strings.Cut(text, flag)
		if !found {
			return false
		}
		if rest == "" || rest[0] != '-' && (rest[0] < 'a' || rest[0] > 'z') {
			return true
		}
		text = rest
	}
}

// Strays returns a line for each variable that is no setting and looks like a slip in the name of one.
func (s *Settings) Strays(environ []string) (lines []string) {
	known := slices.Clone(others)
	for _, name := range s.names() {
		known = append(known, variable(name))
	}
	for name := range variables(environ) {
		if slices.Contains(known, name) {
			continue
		}
		if near := nearest(name, known); distance(name, near) <= 2 {
			lines = append(lines, fmt.Sprintf("%s is no setting; is %s meant?", name, near))
		}
	}
	slices.Sort(lines)
	return lines
}

// Write writes the settings in the form of a file that sets them, with where each came from.
func (s *Settings) Write(w io.Writer) error {
	root := &yaml.Node{Kind: yaml.MappingNode}
	_ = s.each(func(f *pflag.Flag) error {
		value := node(f.Value)
		value.LineComment = s.from[f.Name]
		root.Content = append(root.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: f.Name}, value)
		return nil
	})
	b, err := yaml.Marshal(root)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s\n", bytes.TrimSpace(b)) // a comment in the last line comes without its end
	return err
}

// node returns a value in the form that a file has it.
func node(v pflag.Value) *yaml.Node {
	if list, ok := v.(pflag.SliceValue); ok {
		n := &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
		for _, item := range list.GetSlice() {
			n.Content = append(n.Content, scalar("string", item))
		}
		return n
	}
	return scalar(v.Type(), v.String())
}

func scalar(kind, text string) *yaml.Node {
	tag := map[string]string{"bool": "!!bool", "int": "!!int", "int64": "!!int", "float64": "!!float"}[kind]
	if tag == "" {
		tag = "!!str"
	}
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: text}
}

// nearest returns the candidate that is the fewest edits away, the first of several.
func nearest(name string, candidates []string) string {
	return slices.MinFunc(candidates, func(a, b string) int { return distance(name, a) - distance(name, b) })
}

// distance is the number of bytes to insert, delete or replace to make one text the other.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
