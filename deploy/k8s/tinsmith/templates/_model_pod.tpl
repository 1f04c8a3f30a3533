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
  value: /cache/huggingface
- name: XDG_CACHE_HOME
  value: /cache
- name: TRITON_CACHE_DIR
  value: /cache/triton
- name: TORCHINDUCTOR_CACHE_DIR
  value: /cache/inductor
{{- else }}
# Models are downloaded once, into the shared volume.
- name: HF_HOME
  value: /data/huggingface
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

{{/* Resources of a pod: those of one rank or worker, as often as there are. Takes root, settings and count. */}}
{{- define "tinsmith.modelResources" -}}
{{- $count := .count -}}
{{- $resources := dict -}}
{{- range $kind, $amounts := .settings.resources -}}
{{- $all := dict -}}
{{- range $name, $quantity := $amounts -}}
{{- $times := ternary 1 $count (eq $name "ephemeral-storage") -}}
{{- $_ := set $all $name (include "tinsmith.times" (dict "quantity" $quantity "times" $times)) -}}
{{- end -}}
{{- $_ := set $resources $kind $all -}}
{{- end -}}
{{- if eq .root.Values.device "cuda" -}}
{{- $limits := $resources.limits | default dict -}}
{{- $_ := set $limits (.settings.gpuResource | default .root.Values.gpuResource) ($count | int64 | toString) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Fails when the caches of a sampler alone are more than its pod may have. Takes root, model, settings and count. */}}
{{- define "tinsmith.checkSampler" -}}
{{- with (.settings.resources.limits | default dict).memory -}}
{{- $limit := include "tinsmith.mebibytes" (include "tinsmith.times" (dict "quantity" . "times" $.count)) | int64 -}}
{{- $caches := addf $.settings.snapshotCacheGiB $.settings.fullSnapshotCacheGiB -}}
{{- if eq $.root.Values.device "cpu" -}}{{- $caches = addf $caches $.settings.kvCacheGiB -}}{{- end -}}
{{- if gt (mulf $caches 1024.0 | int64) $limit -}}
{{- fail (printf "the caches of the sampler of %q take %v GiB and its memory limit is %d MiB: raise sampler.resources.limits.memory, or lower snapshotCacheGiB, fullSnapshotCacheGiB or kvCacheGiB" $.model.name $caches $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Startup, readiness and liveness by the gRPC health service. Takes root and settings. */}}
{{- define "tinsmith.modelProbes" -}}
{{- $check := include "tinsmith.grpcCheck" .root -}}
startupProbe:
  {{- $check | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: {{ div (add (.settings.startupSeconds | int64) 9) 10 }}
readinessProbe:
  {{- $check | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 2
livenessProbe:
  {{- $check | nindent 2 }}
  periodSeconds: 20
  timeoutSeconds: 15
  failureThreshold: 6
{{- end -}}

{{/* Kubernetes speaks gRPC health itself since 1.24. */}}
{{- define "tinsmith.grpcCheck" -}}
{{- if semverCompare ">=1.24-0" .Capabilities.KubeVersion.Version -}}
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
      with grpc.insecure_channel("127.0.0.1:9000") as channel:
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
{{- include "tinsmith.extraMounts" . }}
{{- end -}}

{{- define "tinsmith.modelVolumes" -}}
- name: data
  persistentVolumeClaim:
    claimName: {{ include "tinsmith.dataClaim" .root }}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .settings.sharedMemory }}
{{- with .root.Values.modelCache.hostPath }}
- name: cache
  hostPath:
    path: {{ . }}
    type: DirectoryOrCreate
{{- end }}
{{- include "tinsmith.extraVolumes" . }}
{{- end -}}
