{{/* Secrets of ones own: an entry that a pod needs and does not find keeps it from starting, minutes later and
     somewhere else. So it is refused here, where the cluster can be asked: by helm install and upgrade, and by helm
     template with --dry-run=server. One that is not there yet, which something else may be about to make, is none of
     the chart's business. */}}

{{/* Fails when a Secret is there and lacks an entry. Takes root, value (what names the Secret), secret, entries, and
     blank: they may be empty. */}}
{{- define "tinsmith.checkSecret" -}}
{{- if .secret -}}
{{- $live := lookup "v1" "Secret" .root.Release.Namespace .secret | default dict -}}
{{- if $live -}}
{{- range $entry := .entries -}}
{{- $data := $live.data | default dict -}}
{{- if not (ternary (hasKey $data $entry) (index $data $entry) ($.blank | default false)) -}}
{{- fail (printf "Secret %q (%s) has no entry %q, or an empty one: it needs %s" $.secret $.value $entry (join ", " $.entries)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes the root. */}}
{{- define "tinsmith.checkSecrets" -}}
{{- $pair := list "tls.crt" "tls.key" -}}
{{- $v := .Values -}}
{{- include "tinsmith.checkSecret" (dict "root" . "value" "apiKeys.existingSecret" "secret" $v.apiKeys.existingSecret "entries" (list "api-keys") "blank" true) -}}
{{- include "tinsmith.checkSecret" (dict "root" . "value" "huggingFace.existingSecret" "secret" $v.huggingFace.existingSecret "entries" (list "token")) -}}
{{- include "tinsmith.checkSecret" (dict "root" . "value" "gateway.tls.existingSecret" "secret" $v.gateway.tls.existingSecret "entries" $pair) -}}
{{- if $v.redis.externalSecret -}}
{{- include "tinsmith.checkSecret" (dict "root" . "value" "redis.externalSecret" "secret" $v.redis.externalSecret "entries" (list "url")) -}}
{{- else -}}
{{- include "tinsmith.checkSecret" (dict "root" . "value" "redis.existingSecret" "secret" $v.redis.existingSecret "entries" (list "password" "gateway" "trainer" "sampler")) -}}
{{- end -}}
{{- if $v.mtls.enabled -}}
{{- range $role, $secret := $v.mtls.existingSecrets -}}
{{- include "tinsmith.checkSecret" (dict "root" $ "value" (printf "mtls.existingSecrets.%s" $role) "secret" $secret "entries" (append $pair "ca.crt")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
