{{/* What may not come up, or not stay up: a line each. */}}
{{- define "tinsmith.warnings" -}}
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.egress.enabled .Values.redis.externalSecret }}
networkPolicy.egress must have a rule for your Redis: the default ones allow DNS, the release's own pods and port 443
{{- end }}
{{- $bare := list }}
{{- range $component := list "gateway" "trainer" "sampler" }}
{{- if not (or $.Values.image.registry (index $.Values $component).image.repository) }}{{ $bare = append $bare (printf "tinsmith-%s" $component) }}{{ end }}
{{- end }}
{{- with $bare }}
images have no registry: {{ join ", " . }} must be loaded onto the nodes (kind load docker-image, minikube image load), or set image.registry
{{- end }}
{{- if and (eq .Values.data.accessMode "ReadWriteOnce") (not .Values.data.existingClaim) }}
data.accessMode is ReadWriteOnce: all pods must run on one node; with several, set ReadWriteMany and a StorageClass that has it
{{- end }}
{{- if not .Values.redis.externalSecret }}
{{- with ((.Values.redis.resources | default dict).limits | default dict).memory }}
{{- if gt (include "tinsmith.maxmemory" $ | int64) (mulf (include "tinsmith.mebibytes" . | float64) 0.75 | int64) }}
redis.maxmemory is above three quarters of its memory limit, which Redis may pass while it writes its file anew
{{- end }}
{{- end }}
{{- end }}
{{- with ((.Values.gateway.resources | default dict).limits | default dict).memory }}
{{- if gt ($.Values.gateway.memoryMiB | int64) (mulf (include "tinsmith.mebibytes" . | float64) 0.75 | int64) }}
gateway.memoryMiB is above three quarters of its memory limit; the process itself takes some 200 MiB besides
{{- end }}
{{- end }}
{{- range $model := include "tinsmith.models" . | fromJsonArray }}
{{- $auto := $model.sampler.autoscaling }}
{{- if and $auto.enabled (eq (include "tinsmith.sequences" (dict "root" $ "settings" $model.sampler) | int64) 0) (ge (mul $auto.sequences 11 | int64) (2560 | int64)) }}
sampler.autoscaling.sequences of {{ $model.name }} is {{ $auto.sequences | int64 }}, and an engine on a GPU of less than 70 GiB generates 256 sequences at once: set sampler.maxSequences well above it
{{- end }}
{{- range $part := list "trainer" "sampler" }}
{{- $settings := index $model $part }}
{{- if ternary $model.trainer.enabled (gt ($model.sampler.replicas | int64) 0) (eq $part "trainer") }}
{{- $cpu := (($settings.resources | default dict).requests | default dict).cpu | default "0" | toString }}
{{- $cores := hasSuffix "m" $cpu | ternary (divf (trimSuffix "m" $cpu | float64) 1000.0) (trimSuffix "m" $cpu | float64) }}
{{- if and (eq $.Values.device "cuda") (lt $cores ($settings.cpuThreads | float64)) }}
{{ $part }} of {{ $model.name }} asks for {{ $cpu }} CPU of each process and runs {{ $settings.cpuThreads }} threads in it
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
