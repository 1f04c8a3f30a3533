{{/* What may not come up, or not stay up: a line each. */}}
{{- define "tinsmith.warnings" -}}
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.egress.enabled .Values.redis.externalSecret }}
networkPolicy.egress must have a rule for your Redis: the default ones allow DNS, the release's own pods and port 443
{{- end }}
{{- $bare := list }}
{{- range $component := list "gateway" "trainer" "sampler" "client" }}
{{- $settings := index $.Values (eq $component "client" | ternary "test" $component) }}
{{- if not (or $.Values.image.registry $settings.image.repository) }}{{ $bare = append $bare (printf "tinsmith-%s" $component) }}{{ end }}
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
{{- if lt (include "tinsmith.mebibytes" .Values.redis.storage.size | int64) (mul 3 (include "tinsmith.maxmemory" . | int64)) }}
redis.storage.size is less than three times redis.maxmemory, and its file may be twice as large while it is written anew
{{- end }}
{{- end }}
{{- if and (or .Values.gateway.ingress.enabled .Values.gateway.httpRoute.enabled) (not (or .Values.gateway.publicUrl .Values.gateway.trustedProxies)) }}
download links begin with http://, whatever your proxy has: set gateway.publicUrl or gateway.trustedProxies
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
{{- $count := eq $part "trainer" | ternary $settings.ranks (mul ($settings.tensorParallelSize | default 1) ($settings.pipelineParallelSize | default 1)) }}
{{- if ternary $model.trainer.enabled (gt ($model.sampler.replicas | int64) 0) (eq $part "trainer") }}
{{- $cpu := (($settings.resources | default dict).requests | default dict).cpu | default "0" | toString }}
{{- $cores := hasSuffix "m" $cpu | ternary (divf (trimSuffix "m" $cpu | float64) 1000.0) (trimSuffix "m" $cpu | float64) }}
{{- if and (eq $.Values.device "cuda") (lt $cores ($settings.cpuThreads | float64)) }}
{{ $part }} of {{ $model.name }} asks for {{ $cpu }} CPU of each process and runs {{ $settings.cpuThreads }} threads in it
{{- end }}
{{- if and (eq $.Values.device "cuda") (not (or $settings.image.repository $settings.image.tag $settings.image.digest $.Values.image.tag)) }}
{{ $part }} of {{ $model.name }} computes on GPUs and has the image of tag {{ $.Chart.AppVersion }}, which is for CPUs unless you built it otherwise: set {{ $part }}.image.tag
{{- end }}
{{- with (($settings.resources | default dict).limits | default dict).memory }}
{{- $caches := ternary 0.0 (addf $settings.snapshotCacheGiB $settings.fullSnapshotCacheGiB (ternary (mulf ($settings.kvCacheGiB | default 0) $count) 0.0 (eq $.Values.device "cpu"))) (eq $part "trainer") }}
{{- $taken := add (include "tinsmith.mebibytes" $settings.sharedMemory) (mulf $caches 1024.0 | int64) | int64 }}
{{- $limit := include "tinsmith.mebibytes" (include "tinsmith.times" (dict "quantity" . "times" $count)) | int64 }}
{{- if gt $taken (mulf $limit 0.75 | int64) }}
{{ $part }} of {{ $model.name }} may have {{ $limit }} MiB, of which sharedMemory and caches may take {{ $taken }} MiB
{{- end }}
{{- end }}
{{- $grace := $settings.terminationGracePeriodSeconds }}
{{- if and (eq $part "sampler") (not (kindIs "string" $grace)) (le ($grace | int64) ($settings.drainSeconds | int64)) }}
sampler of {{ $model.name }} is killed {{ $grace | int64 }} s after it was asked to end, and its samples may take drainSeconds, {{ $settings.drainSeconds | int64 }} s
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
