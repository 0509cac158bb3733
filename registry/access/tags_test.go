package access

import "testing"

func TestTagPatterns(t *testing.T) {
	p, err := ParseTagPatterns([]string{"team/**:v*", "prod/*:*", "a:latest"})
	if err != nil {
		t.Fatal(err)
	}
	for ref, want := range map[[2]string]bool{
		{"team/x", "v1"}: true, {"team/x/y", "v"}: true, {"team/x", "dev"}: false, {"team", "v1"}: false,
		{"prod/x", "Any_thing.1"}: true, {"prod/x/y", "v1"}: false, {"a", "latest"}: true, {"a", "latest2"}: false,
		{"xa", "latest"}: false, {"team/x", "xv1"}: false, {"a", "Xlatest"}: false,
	} {
		if p.Match(ref[0], ref[1]) != want {
			t.Errorf("%s:%s, want %v", ref[0], ref[1], want)
		}
	}
	if !p.MatchRepo("team/x") || p.MatchRepo("b") || (TagPatterns{}).Match("team/x", "v1") {
		t.Error("MatchRepo, or the zero patterns")
	}
	for _, bad := range []string{"", "team/**", ":v1", "a:", "a:b:c", "A:v1", "a/**b:v1", "a:v+", "a@b:c", "a: v1", "a:v1\n"} {
		if _, err := ParseTagPatterns([]string{"ok:v1", bad}); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

func TestRepositories(t *testing.T) {
	r, err := ParseRepositories([]string{"team/**", "a"})
	if err != nil || !r.Match("team/x/y") || !r.Match("a") || r.Match("b") || (Repositories{}).Match("a") {
		t.Error(r, err)
	}
	if _, err := ParseRepositories([]string{"A"}); err == nil {
		t.Error("an upper-case letter was taken")
	}
}
