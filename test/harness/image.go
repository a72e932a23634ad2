// Copyright The cnireload Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"time"
)

type blob struct {
	mediaType string
	data      []byte
}

func (b blob) hash() string {
	sum := sha256.Sum256(b.data)
	return hex.EncodeToString(sum[:])
}

func (b blob) descriptor() map[string]any {
	return map[string]any{"mediaType": b.mediaType, "digest": "sha256:" + b.hash(), "size": len(b.data)}
}

// writeImage writes an OCI archive with one image of that name, whose only
// file is the binary.
func writeImage(w io.Writer, name, path string) error {
	binary, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	program := filepath.Base(path)
	var layer bytes.Buffer
	if err := writeTar(&layer, []file{{program, 0o755, binary}}); err != nil {
		return err
	}
	layerBlob := blob{"application/vnd.oci.image.layer.v1.tar", layer.Bytes()}
	config, err := encode("application/vnd.oci.image.config.v1+json", map[string]any{
		"architecture": runtime.GOARCH,
		"os":           "linux",
		"config":       map[string]any{"Entrypoint": []string{"/" + program}},
		"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + layerBlob.hash()}},
	})
	if err != nil {
		return err
	}
	manifest, err := encode("application/vnd.oci.image.manifest.v1+json", map[string]any{
		"schemaVersion": 2,
		"mediaType":     "application/vnd.oci.image.manifest.v1+json",
		"config":        config.descriptor(),
		"layers":        []any{layerBlob.descriptor()},
	})
	if err != nil {
		return err
	}
	entry := manifest.descriptor()
	entry["annotations"] = map[string]string{"io.containerd.image.name": name}
	index, err := encode("", map[string]any{"schemaVersion": 2, "manifests": []any{entry}})
	if err != nil {
		return err
	}
	files := []file{
		{"oci-layout", 0o644, []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{"index.json", 0o644, index.data},
	}
	for _, b := range []blob{layerBlob, config, manifest} {
		files = append(files, file{"blobs/sha256/" + b.hash(), 0o644, b.data})
	}
	return writeTar(w, files)
}

func encode(mediaType string, v any) (blob, error) {
	data, err := json.Marshal(v)
	return blob{mediaType, data}, err
}

type file struct {
	name string
	mode int64
	data []byte
}

func writeTar(w io.Writer, files []file) error {
	t := tar.NewWriter(w)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.data)), ModTime: time.Unix(0, 0), Typeflag: tar.TypeReg}
		if err := t.WriteHeader(h); err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
		if _, err := t.Write(f.data); err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
	}
	return t.Close()
}
