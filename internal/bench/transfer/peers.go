package transfer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/kiln-registry/kiln-registry/internal/bench/bare"
	"github.com/kiln-registry/kiln-registry/internal/bench/report"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

// script downloads a model and says how long that took, and how many processor seconds, without the start of Python and
// what it loads.
const script = `
import sys, time
from huggingface_hub import snapshot_download
began, used = time.monotonic(), time.process_time()
snapshot_download(sys.argv[1], cache_dir=sys.argv[2])
print(time.monotonic() - began, time.process_time() - used)
`

// snapshot has huggingface_hub download the model of a hub into a cache below dir.
func (b *Bench) snapshot(ctx context.Context, from *rig.Server, dir string) (rig.Cost, error) {
	env := []string{
		"HF_ENDPOINT=" + from.URL, "HF_HOME=" + dir, "HF_HUB_DISABLE_XET=1", "HF_HUB_DISABLE_TELEMETRY=1",
		"HF_HUB_DISABLE_PROGRESS_BARS=1", "HF_TOKEN=",
	}
	python := filepath.Join(b.Tools, "huggingface", "bin", "python")
	c, err := rig.RunWith(ctx, env, python, "-c", script, bare.HubModel, filepath.Join(dir, "cache"))
	if err != nil {
		return c, err
	}
	if _, err := fmt.Sscan(c.Said, &c.Wall, &c.CPU); err != nil {
		return c, fmt.Errorf("huggingface_hub: %w", err)
	}
	var got int64
	blobs, err := filepath.Glob(filepath.Join(dir, "cache", "*", "blobs", "*"))
	for _, path := range blobs {
		if i, err := os.Stat(path); err == nil {
			got += i.Size()
		}
	}
	if float64(got) < b.payload() {
		return c, errors.Join(err, fmt.Errorf("huggingface_hub: %d bytes arrived", got))
	}
	return c, nil
}

// nginxConfig is one process that sends the files of a folder by sendfile and keeps its own files in another.
const nginxConfig = `daemon off;
master_process off;
pid %[1]s/pid;
error_log stderr;
events {}
http {
  access_log off;
  sendfile on;
  sendfile_max_chunk 2m;
  tcp_nopush on;
  client_body_temp_path %[1]s/body;
  proxy_temp_path %[1]s/proxy;
  fastcgi_temp_path %[1]s/fastcgi;
  uwsgi_temp_path %[1]s/uwsgi;
  scgi_temp_path %[1]s/scgi;
  server {
    listen %[2]s;
    location = /ready { return 200; }
    location / { root %[3]s; }
  }
}
`

// nginx runs Debian's nginx on a folder.
func (b *Bench) nginx(ctx context.Context, dir string) (*rig.Server, error) {
	bin := filepath.Join(b.Tools, "bin", "nginx")
	if _, err := os.Stat(bin); err != nil {
		return nil, err
	}
	state, err := os.MkdirTemp(b.Dir, "nginx-")
	if err != nil {
		return nil, err
	}
	config := filepath.Join(state, "nginx.conf")
	var failed error
	s, err := rig.Start(ctx, "/ready", bin, func(addr string) []string {
		failed = os.WriteFile(config, fmt.Appendf(nil, nginxConfig, state, addr, dir), 0o666)
		return []string{"-p", state, "-e", "stderr", "-c", config}
	})
	if err = errors.Join(failed, err); err != nil {
		os.RemoveAll(state)
		return nil, err
	}
	s.Dir = state
	return s, nil
}

// fetches are as many as a round has of what costs a server little.
const fetches = 4

// servers compares what the same GETs cost the registry, the bare server and nginx.
func (b *Bench) servers(ctx context.Context, h held, reg *rig.Server) ([]report.Row, error) {
	const sendfile, nginx = "bare net/http", "nginx"
	plain, err := startSelf(ctx, "bare", h.dir)
	if err != nil {
		return nil, err
	}
	defer plain.Stop()
	var from, at []string
	for _, s := range h.shards {
		from, at = append(from, plain.URL+"/file/"+s.Filename), append(at, "/"+s.Filename)
	}
	side := func(name string, s *rig.Server, urls []string) rig.Side {
		return rig.Side{Name: name, Work: func(int) (rig.Cost, error) {
			c, err := serving(s, func() error {
				for range fetches {
					if _, err := self(ctx, append([]string{"get"}, urls...)...); err != nil {
						return err
					}
				}
				return nil
			})
			c.CPU /= fetches
			return c, err
		}}
	}
	sides := []rig.Side{side(kiln, reg, h.blobs(reg.URL)), side(sendfile, plain, from)}
	peer, err := b.nginx(ctx, h.dir)
	switch {
	case err == nil:
		defer peer.Stop()
		for i := range at {
			at[i] = peer.URL + at[i]
		}
		sides = append(sides, side(nginx, peer, at))
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	rs, err := rig.Turns(b.Rounds, sides...)
	if err != nil {
		return nil, fmt.Errorf("GET: %w", err)
	}
	rows := []report.Row{row(fmt.Sprintf("GET of %d shards at once: server CPU / bare net/http with sendfile", shards),
		rs.CPURatio(kiln, sendfile), b.perGB(rs.CPU, "cpu-s", kiln, sendfile))}
	if peer == nil {
		rows[0].Notes += "; nginx is left out, it is not installed"
		return rows, nil
	}
	return append(rows, row("server CPU / nginx with sendfile", rs.CPURatio(kiln, nginx),
		b.perGB(rs.CPU, "cpu-s", nginx))), nil
}
