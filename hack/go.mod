module github.com/cnireload/cnireload/hack

go 1.26.0

require golang.org/x/mod v0.43.0

require github.com/bluekeyes/go-gitdiff v0.9.0
