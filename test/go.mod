module github.com/cnireload/cnireload/test

go 1.26.0

require (
	github.com/google/go-cmp v0.7.0
	golang.org/x/sys v0.48.0
	google.golang.org/grpc v1.83.2
	google.golang.org/protobuf v1.36.12-0.20260120151049-f2248ac996af
	gotest.tools/v3 v3.5.2
	k8s.io/cri-api v0.37.0
)

require (
	golang.org/x/net v0.58.0 // indirect
	golang.org/x/text v0.41.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260526163538-3dc84a4a5aaa // indirect
)
