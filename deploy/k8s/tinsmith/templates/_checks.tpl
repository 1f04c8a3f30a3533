{{/* A Kubernetes quantity so many times, rounded up. Takes quantity and times. */}}
{{- define "tinsmith.times" -}}
{{- $text := .quantity | toString -}}
{{- $number := regexFind "^[0-9.]+([eE][+-]?[0-9]+)?" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- $product := mulf ($number | float64) (.times | float64) -}}
{{- if eq (floor $product) $product }}{{ $product | int64 }}{{ else }}{{ $product }}{{ end }}{{ $unit }}
{{- end -}}

{{/* Mebibytes of a quantity of memory, as a whole number. Takes the quantity. */}}
{{- define "tinsmith.mebibytes" -}}
{{- $number := regexFind "^[0-9.]+([eE][+-]?[0-9]+)?" (toString .) -}}
{{- $unit := trimPrefix $number (toString .) -}}
{{- $bytes := dict "" 1.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "m" 0.001 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- divf (mulf ($number | float64) (index $bytes $unit)) 1048576.0 | floor | int64 -}}
{{- end -}}

{{/* Mebibytes of the bundled Redis' maxmemory. Takes the root. */}}
{{- define "tinsmith.maxmemory" -}}
{{- include "tinsmith.mebibytes" (.Values.redis.maxmemory | replace "gb" "Gi" | replace "mb" "Mi") -}}
{{- end -}}

{{/* Fails when Redis may fill more memory than its container may have: it would be killed again at every start. */}}
{{- define "tinsmith.checkRedis" -}}
{{- with ((.Values.redis.resources | default dict).limits | default dict).memory -}}
{{- if ge (include "tinsmith.maxmemory" $ | int64) (include "tinsmith.mebibytes" . | int64) -}}
{{- fail (printf "redis.maxmemory %s is not below redis.resources.limits.memory %v: leave about 30 %% of the limit for what Redis needs besides" $.Values.redis.maxmemory .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails when a gateway may hold more in flight than its container may have, and for what the API would refuse. */}}
{{- define "tinsmith.checkGateway" -}}
{{- if (has (.Values.metrics.port | int64) (list (8000 | int64) (8001 | int64) (9000 | int64))) -}}
{{- fail (printf "metrics.port %d is taken: 8000 and 8001 are the gateways', 9000 the trainers' and samplers'" (.Values.metrics.port | int64)) -}}
{{- end -}}
{{- if eq (.Values.gateway.service.httpPort | int64) (.Values.gateway.service.grpcPort | int64) -}}
{{- fail "gateway.service.httpPort and grpcPort must differ" -}}
{{- end -}}
{{- with .Values.gateway.autoscaling -}}
{{- if .enabled -}}
{{- if gt (.minReplicas | int64) (.maxReplicas | int64) -}}
{{- fail "gateway.autoscaling.minReplicas is above maxReplicas" -}}
{{- end -}}
{{- if not (($.Values.gateway.resources | default dict).requests | default dict).cpu -}}
{{- fail "gateway.autoscaling goes by gateway.resources.requests.cpu: set it" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with ((.Values.gateway.resources | default dict).limits | default dict).memory -}}
{{- if ge ($.Values.gateway.memoryMiB | int64) (include "tinsmith.mebibytes" . | int64) -}}
{{- fail (printf "gateway.memoryMiB %d is not below gateway.resources.limits.memory %v: keep it at about 70 %% of the limit" ($.Values.gateway.memoryMiB | int64) .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
