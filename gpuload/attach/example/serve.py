#!/usr/bin/env python3
"""Serves sentence embeddings over HTTP, from a folder or from weights that kiln-pull resident holds.

    serve.py FOLDER                       weights and all else from the folder
    serve.py FOLDER --aggregate sha256:…  config and tokenizer from the folder, the weights where they are in memory

POST {"sentences": ["…"]} to / answers {"embeddings": [[…]]}. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

import kiln_attach


def load(folder: str, aggregate: str | None) -> torch.nn.Module:
    if aggregate is None:
        return AutoModel.from_pretrained(folder, dtype="auto")
    model = AutoModel.from_config(AutoConfig.from_pretrained(folder))
    with kiln_attach.attach(aggregate) as held:
        # assign: the parameters are the resident tensors, and keep the lease.
        missing, _ = model.load_state_dict(held.tensors(), strict=False, assign=True)
    if missing:
        raise SystemExit(f"error: the resident base has nothing for {missing}")
    return model


class Handler(BaseHTTPRequestHandler):
    tokenizer, model = None, None

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = self.tokenizer(asked["sentences"], padding=True, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            states = self.model(**words).last_hidden_state
        mask = words["attention_mask"].unsqueeze(-1)
        embeddings = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
        body = json.dumps({"embeddings": embeddings.tolist()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    p = argparse.ArgumentParser(description="Serve sentence embeddings.")
    p.add_argument("folder")
    p.add_argument("--aggregate", help="of resident weights to use instead of the folder's")
    p.add_argument("--port", type=int, default=0)
    a = p.parse_args()
    Handler.tokenizer = AutoTokenizer.from_pretrained(a.folder)
    Handler.model = load(a.folder, a.aggregate).eval()
    server = HTTPServer(("127.0.0.1", a.port), Handler)
    print(f"http://127.0.0.1:{server.server_port}/", flush=True)
    server.serve_forever()
