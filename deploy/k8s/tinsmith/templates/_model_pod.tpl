{{/* What the pods of trainers and samplers share. */}}

{{/* Environment. Takes root and settings. */}}
{{- define "tinsmith.modelEnv" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: OMP_NUM_THREADS
  value: {{ .settings.cpuThreads | int64 | quote }}
{{- if .root.Values.modelCache.hostPath }}
# Models are downloaded once a node; what is compiled for its GPUs survives a restart.
- name: HF_HOME
  value: {{ include "tinsmith.hubCache" . }}
- name: XDG_CACHE_HOME
  value: /cache
- name: TRITON_CACHE_DIR
  value: /cache/triton
- name: TORCHINDUCTOR_CACHE_DIR
  value: /cache/inductor
- name: FLASHINFER_WORKSPACE_BASE
  value: /cache
- name: CUDA_CACHE_PATH
  value: /cache/cuda
{{- else }}
# Models are downloaded once, into the shared volume.
- name: HF_HOME
  value: {{ include "tinsmith.hubCache" . }}
{{- end }}
{{- with .root.Values.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: token
{{- end }}
{{ include "tinsmith.env" . }}
{{- end -}}

{{/* Resources of a pod's containers: those of one rank or worker, as often as there are. Takes root, settings and count. */}}
{{- define "tinsmith.processResources" -}}
{{- $count := .count -}}
{{- $resources := dict -}}
{{- range $kind, $amounts := .settings.resources | default dict -}}
{{- $all := dict -}}
{{- range $name, $quantity := $amounts -}}
{{- $times := ternary 1 $count (eq $name "ephemeral-storage") -}}
{{- $_ := set $all $name (include "tinsmith.times" (dict "quantity" $quantity "times" $times)) -}}
{{- end -}}
{{- $_ := set $resources $kind $all -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The same and its GPUs. */}}
{{- define "tinsmith.modelResources" -}}
{{- $resources := include "tinsmith.processResources" . | fromYaml -}}
{{- if eq .root.Values.device "cuda" -}}
{{- $limits := $resources.limits | default dict -}}
{{- $_ := set $limits (.settings.gpuResource | default .root.Values.gpuResource) (.count | int64 | toString) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Name of what belongs to one node of a trainer. Takes the trainer's name and the node. */}}
{{- define "tinsmith.nodeName" -}}
{{- $node := last . -}}
{{- first . -}}{{- if kindIs "string" $node -}}-{{ $node }}{{- else if $node -}}-node-{{ $node }}{{- end -}}
{{- end -}}

{{/* Fails when a trainer could not start. Takes root, model and settings. */}}
{{- define "tinsmith.checkTrainer" -}}
{{- $own := .settings -}}
{{- $ranks := mul $own.ranks ($own.nodes | default 1) | int64 -}}
{{- $group := $own.zeroReplicaRanks | default 1 | int64 -}}
{{- if and (ne ($own.zeroStage | int64) 3) (or (ne $group 1) $own.zeroQuantizedBase (include "tinsmith.isNumber" $own.zeroPrefetchElements)) -}}
{{- fail (printf "model %q: trainer.zeroReplicaRanks, zeroPrefetchElements and zeroQuantizedBase say how ZeRO-3 shares weights: set trainer.zeroStage to 3" .model.name) -}}
{{- end -}}
{{- if and $own.gpuMemoryShare (ne .root.Values.device "cuda") -}}
{{- fail (printf "model %q: trainer.gpuMemoryShare is for device cuda: leave it at 0" .model.name) -}}
{{- end -}}
{{- if and (ne $group 1) (or (ge $group $ranks) (ne (mod $ranks $group) 0)) -}}
{{- fail (printf "model %q: trainer.zeroReplicaRanks %d cannot cut a trainer of %d ranks into several groups of so many: set a divisor below that" .model.name $group $ranks) -}}
{{- end -}}
{{- /* DeepSpeed's segment for each rank, where all are in one pod: one without room for it ends a rank by a signal. */ -}}
{{- $shared := mul $ranks 67 -}}
{{- if and (eq .root.Values.device "cpu") (eq ($own.nodes | default 1 | int64) 1) (gt $ranks 1) (gt $shared (include "tinsmith.mebibytes" $own.sharedMemory | int64)) -}}
{{- fail (printf "model %q: %d ranks on a CPU take %d MiB of /dev/shm, 67 each, and trainer.sharedMemory is %v: raise it" .model.name $ranks $shared $own.sharedMemory) -}}
{{- end -}}
{{- end -}}

{{/* Fails when a sampler could not start, or its caches alone are more than its pod may have. Takes root, model, settings and count. */}}
{{- define "tinsmith.checkSampler" -}}
{{- if and (eq .settings.kvCacheDtype "fp8") (ne .root.Values.device "cuda") -}}
{{- fail (printf "model %q: sampler.kvCacheDtype fp8 is for device cuda: leave it at auto" .model.name) -}}
{{- end -}}
{{- if and (gt (.settings.kvCacheGiB | float64) 0.0) (eq .root.Values.device "cuda") -}}
{{- fail (printf "model %q: sampler.kvCacheGiB %v is for device cpu, and on cuda sampler.gpuMemoryUtilization says what keys and values have: leave it at 0" .model.name .settings.kvCacheGiB) -}}
{{- end -}}
{{- if and (ne .settings.quantization "auto") (ne .root.Values.device "cuda") -}}
{{- fail (printf "model %q: sampler.quantization %s is for device cuda: leave it at auto" .model.name .settings.quantization) -}}
{{- end -}}
{{- if and (ne .settings.quantization "auto") (eq .root.Values.dtype "float32") -}}
{{- fail (printf "model %q: sampler.quantization %s is for bfloat16, and dtype says float32: leave one of them at auto" .model.name .settings.quantization) -}}
{{- end -}}
{{- if and (eq .root.Values.device "cuda") (eq .root.Values.dtype "float32") (gt (.settings.maxLoras | int64) 0) -}}
{{- fail (printf "model %q: dtype float32 on device cuda is for samplers without adapters: leave it at auto, or set sampler.maxLoras to 0" .model.name) -}}
{{- end -}}
{{- if and (eq .settings.modelRunner "v2") (ne .root.Values.device "cuda") -}}
{{- fail (printf "model %q: sampler.modelRunner v2 is for device cuda: leave it at auto" .model.name) -}}
{{- end -}}
{{- if and (gt (.settings.pipelineParallelSize | int64) 1) (gt (.settings.speculativeNgramTokens | int64) 0) -}}
{{- fail (printf "model %q: sampler.speculativeNgramTokens does not go with sampler.pipelineParallelSize: leave one of them out" .model.name) -}}
{{- end -}}
{{- if and (gt (.settings.pipelineParallelSize | int64) 1) .settings.routedExperts -}}
{{- fail (printf "model %q: sampler.routedExperts does not go with sampler.pipelineParallelSize: leave one of them out" .model.name) -}}
{{- end -}}
{{- if and (eq .root.Values.device "cuda") (eq .settings.modelRunner "v1") .settings.routedExperts -}}
{{- fail (printf "model %q: sampler.routedExperts on device cuda needs sampler.modelRunner v2: leave one of them out" .model.name) -}}
{{- end -}}
{{- $step := .settings.maxBatchedTokens | int64 -}}
{{- $sequences := .settings.maxSequences | int64 -}}
{{- if and $step (lt $step $sequences) -}}
{{- fail (printf "model %q: sampler.maxBatchedTokens is %d, and a step computes a token of each of sampler.maxSequences %d: give the first at least the second" .model.name $step $sequences) -}}
{{- end -}}
{{- with ((.settings.resources | default dict).limits | default dict).memory -}}
{{- $limit := include "tinsmith.mebibytes" (include "tinsmith.times" (dict "quantity" . "times" $.count)) | int64 -}}
{{- $caches := addf $.settings.snapshotCacheGiB $.settings.fullSnapshotCacheGiB -}}
{{- if eq $.root.Values.device "cpu" -}}{{- $caches = addf $caches (mulf $.settings.kvCacheGiB $.count) -}}{{- end -}}
{{- if gt (mulf $caches 1024.0 | int64) $limit -}}
{{- fail (printf "the caches of the sampler of %q take %v GiB and its memory limit is %d MiB: raise sampler.resources.limits.memory, or lower snapshotCacheGiB, fullSnapshotCacheGiB or kvCacheGiB" $.model.name $caches $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Something or nothing: whether a value is a number, and neither a word nor missing. */}}
{{- define "tinsmith.isNumber" -}}
{{- if or (kindIs "float64" .) (kindIs "int64" .) (kindIs "int" .) -}}yes{{- end -}}
{{- end -}}

{{/* Startup, readiness and liveness by the gRPC health service. Takes root and settings, and startup: seconds for it, else
     those of the settings. */}}
{{- define "tinsmith.modelProbes" -}}
{{- $check := include "tinsmith.grpcCheck" . -}}
{{- /* A program that is started anew each time takes seconds where the CPU is busy. */}}
{{- $timeout := ternary 30 10 (hasPrefix "exec" $check) -}}
startupProbe:
  {{- $check | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: {{ $timeout }}
  failureThreshold: {{ div (add (.startup | default .settings.startupSeconds | int64) 9) 10 }}
readinessProbe:
  {{- $check | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: {{ $timeout }}
  failureThreshold: 2
livenessProbe:
  {{- $check | nindent 2 }}
  periodSeconds: 20
  timeoutSeconds: {{ max $timeout 15 }}
  failureThreshold: 6
{{- end -}}

{{/* Kubernetes speaks gRPC health itself since 1.24, and never with a certificate. Takes root and component. */}}
{{- define "tinsmith.grpcCheck" -}}
{{- if and (semverCompare ">=1.24-0" .root.Capabilities.KubeVersion.Version) (not .root.Values.mtls.enabled) -}}
grpc:
  port: 9000
{{- else -}}
exec:
  command:
    - python
    - -c
    - |
      import grpc
      from grpc_health.v1 import health_pb2, health_pb2_grpc
      {{- if .root.Values.mtls.enabled }}
      from pathlib import Path
      files = [Path("/etc/tinsmith-identity", name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt")]
      named = [("grpc.ssl_target_name_override", "{{ .component }}.tinsmith.internal")]
      with grpc.secure_channel("127.0.0.1:9000", grpc.ssl_channel_credentials(*files), named) as channel:
      {{- else }}
      with grpc.insecure_channel("127.0.0.1:9000") as channel:
      {{- end }}
          reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=8)
      raise SystemExit(reply.status != health_pb2.HealthCheckResponse.SERVING)
{{- end -}}
{{- end -}}

{{/* Each takes root and settings. */}}
{{- define "tinsmith.modelMounts" -}}
- name: data
  mountPath: /data
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
{{- if .root.Values.modelCache.hostPath }}
- name: cache
  mountPath: /cache
{{- end }}
{{- include "tinsmith.identityMount" . }}
{{- include "tinsmith.extraMounts" . }}
{{- end -}}

{{- define "tinsmith.modelVolumes" -}}
- name: data
  persistentVolumeClaim:
    claimName: {{ include "tinsmith.dataClaim" .root }}
- name: tmp
  emptyDir:
    sizeLimit: {{ .settings.temporarySize }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .settings.sharedMemory }}
{{- with .root.Values.modelCache.hostPath }}
- name: cache
  hostPath:
    path: {{ . }}
    # One that Kubernetes makes is root's, and none of these pods could write there.
    type: Directory
{{- end }}
{{- include "tinsmith.identityVolume" . }}
{{- include "tinsmith.extraVolumes" . }}
{{- end -}}

{{/* Where models from Hugging Face are kept. Takes root. */}}
{{- define "tinsmith.hubCache" -}}
{{- ternary "/cache/huggingface" "/data/huggingface" (ne .root.Values.modelCache.hostPath "") -}}
{{- end -}}

{{/* What trainer and sampler load: a pinned revision is the directory that the download makes of it, so that neither ever
     asks the hub for another. Takes root and model. */}}
{{- define "tinsmith.modelPath" -}}
{{- if .model.revision -}}
{{ include "tinsmith.hubCache" . }}/hub/models--{{ .model.path | replace "/" "--" }}/snapshots/{{ .model.revision }}
{{- else -}}
{{ .model.path }}
{{- end -}}
{{- end -}}

{{/* The container that downloads a pinned revision before the pod's own starts; what is there already is not downloaded
     again, and pods that come at the same time wait for one another's files. Takes the same, component and settings. */}}
{{- define "tinsmith.download" -}}
- name: download
  image: {{ include "tinsmith.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  terminationMessagePolicy: FallbackToLogsOnError
  command: [tini, --, python, -c]
  args:
    - |
      import sys
      from huggingface_hub import snapshot_download
      repository, revision, expected = sys.argv[1:]
      found = snapshot_download(repository, revision=revision, ignore_patterns=["*.bin", "*.gguf", "*.pth", "original/*"])
      if found != expected:
          raise SystemExit(f"{repository} {revision} is at {found}, not at {expected}")
    - {{ .model.path }}
    - {{ .model.revision | quote }}
    - {{ include "tinsmith.modelPath" . }}
  {{- include "tinsmith.envFrom" . | nindent 2 }}
  env:
    {{- include "tinsmith.modelEnv" . | nindent 4 }}
  # What the pod has anyway: a quota may ask each container for limits.
  resources:
    {{- include "tinsmith.processResources" . | nindent 4 }}
  securityContext:
    {{- toYaml (.root.Values.containerSecurityContext | default dict) | nindent 4 }}
  volumeMounts:
    {{- include "tinsmith.modelMounts" . | nindent 4 }}
{{- end -}}

{{/* Most samplers of a model at once. Takes its settings. */}}
{{- define "tinsmith.samplers" -}}
{{- ternary .autoscaling.maxReplicas .replicas .autoscaling.enabled | int64 -}}
{{- end -}}

{{/* Sequences that a sampler generates at once; 0: vLLM's choice, by the GPU. Takes root and settings. */}}
{{- define "tinsmith.sequences" -}}
{{- if .settings.maxSequences -}}
{{- .settings.maxSequences | int64 -}}
{{- else if eq .root.Values.device "cpu" -}}
{{- /* As engine_args of services/sampler/engine/settings.py has it; a step has a token of each. */ -}}
{{- $most := mul 256 .settings.tensorParallelSize .settings.pipelineParallelSize -}}
{{- min $most (.settings.maxBatchedTokens | default $most) -}}
{{- else -}}
0
{{- end -}}
{{- end -}}
