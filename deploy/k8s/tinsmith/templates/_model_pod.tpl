{{/* What the pods of trainers and samplers share. */}}

{{/* Environment. Takes root and settings. */}}
{{- define "tinsmith.modelEnv" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: OMP_NUM_THREADS
  value: {{ .settings.cpuThreads | int64 | quote }}
# Models are downloaded once, into the shared volume.
- name: HF_HOME
  value: /data/huggingface
{{- with .root.Values.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: token
{{- end }}
{{ include "tinsmith.env" . }}
{{- end -}}

{{/* Resources with GPUs. Takes root, settings and gpus. */}}
{{- define "tinsmith.modelResources" -}}
{{- $resources := deepCopy .settings.resources -}}
{{- if eq .root.Values.device "cuda" -}}
{{- $limits := $resources.limits | default dict -}}
{{- $_ := set $limits .root.Values.gpuResource (.gpus | int64 | toString) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
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

{{- define "tinsmith.modelMounts" -}}
- name: data
  mountPath: /data
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
{{- end -}}

{{/* Takes root and settings. */}}
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
{{- end -}}
