{{/* Names, labels and settings that several objects share. */}}

{{- define "tinsmith.fullname" -}}
{{- $name := .Values.fullnameOverride | default .Release.Name -}}
{{- if gt (len $name) 20 -}}
{{- fail (printf "%q is too long to begin object names: set fullnameOverride to 20 characters or fewer" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* JSON list of the models: id, name, path, and the settings of their trainer and sampler. A key that the
     model sets replaces the default of that key, zero and false included (which sprig's merge would ignore). */}}
{{- define "tinsmith.models" -}}
{{- $models := list -}}
{{- $ids := dict -}}
{{- $names := dict -}}
{{- range $model := .Values.models -}}
{{- $derived := regexReplaceAll "[^a-z0-9]+" ($model.name | splitList "/" | last | lower) "-" | trunc 23 | trimAll "-" -}}
{{- $id := $model.id | default $derived -}}
{{- if not $id -}}{{- fail (printf "model %q needs an id" $model.name) -}}{{- end -}}
{{- if hasKey $names $model.name -}}{{- fail (printf "model %q is listed twice" $model.name) -}}{{- end -}}
{{- if hasKey $ids $id -}}
{{- fail (printf "models %q and %q have the same id %q: set `id` of one of them" (get $ids $id) $model.name $id) -}}
{{- end -}}
{{- $_ := set $ids $id $model.name -}}
{{- $_ := set $names $model.name true -}}
{{- $one := dict "id" $id "name" $model.name "path" $model.path -}}
{{- range $part := list "trainer" "sampler" -}}
{{- $settings := deepCopy (index $.Values $part) -}}
{{- range $key, $value := index $model $part -}}{{- $_ := set $settings $key $value -}}{{- end -}}
{{- $_ := set $one $part $settings -}}
{{- end -}}
{{- $models = append $models $one -}}
{{- end -}}
{{- $models | toJson -}}
{{- end -}}

{{/* Argument of the gateways: the models that they wait for, also while these load for the first time. */}}
{{- define "tinsmith.baseModelArgs" -}}
{{- $known := list -}}
{{- range $model := include "tinsmith.models" . | fromJsonArray -}}
{{- $known = append $known (dict "name" $model.name "trained" true "sampled" (gt ($model.sampler.replicas | int64) 0)) -}}
{{- end -}}
- {{ printf "--base-models=%s" ($known | toJson) | quote }}
{{- end -}}

{{/* Labels that select the pods of one component. Takes root, component and, for trainers and samplers, model. */}}
{{- define "tinsmith.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
tinsmith/model: {{ .id }}
{{- end }}
{{- end -}}

{{/* All labels of an object. Takes the same. */}}
{{- define "tinsmith.labels" -}}
{{ include "tinsmith.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{/* Image of a component. Takes root and component. */}}
{{- define "tinsmith.image" -}}
{{- with .root.Values.image.registry }}{{ . | trimSuffix "/" }}/{{ end -}}
tinsmith-{{ .component }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{/* First lines of a pod's spec. Takes root, component, uid, settings. */}}
{{- define "tinsmith.pod" -}}
serviceAccountName: {{ include "tinsmith.fullname" .root }}-{{ .component }}
automountServiceAccountToken: false
# A Service called "tinsmith" would set TINSMITH_PORT, which the services read as a flag.
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .uid | int64 }}
  runAsGroup: {{ .uid | int64 }}
  fsGroup: {{ .uid | int64 }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tinsmith.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Secret and entry that hold the password of the bundled Redis. */}}
{{- define "tinsmith.redisPassword" -}}
secretKeyRef:
  name: {{ .Values.redis.existingSecret | default (printf "%s-redis" (include "tinsmith.fullname" .)) }}
  key: password
{{- end -}}

{{/* Environment of gateway, trainer and sampler. Takes root and settings. The kubelet puts the password into
     the URL, so that it is in Secrets alone. */}}
{{- define "tinsmith.env" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- if .root.Values.redis.externalSecret }}
- name: TINSMITH_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.redis.externalSecret }}
      key: url
{{- else }}
- name: REDIS_PASSWORD
  valueFrom:
    {{- include "tinsmith.redisPassword" .root | nindent 4 }}
- name: TINSMITH_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "tinsmith.fullname" .root }}-redis:6379/0
{{- end }}
# The root file system is read-only.
- name: HOME
  value: /tmp
{{- with .settings.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The shared volume. */}}
{{- define "tinsmith.dataClaim" -}}
{{- .Values.data.existingClaim | default (printf "%s-data" (include "tinsmith.fullname" .)) -}}
{{- end -}}

{{/* Argument and environment of those who read or write checkpoints. Take the root. */}}
{{- define "tinsmith.checkpointArgs" -}}
{{- with .Values.checkpoints.store }}
- --checkpoint-store={{ . }}
{{- end }}
{{- end -}}

{{- define "tinsmith.checkpointEnvFrom" -}}
{{- with .Values.checkpoints.existingSecret }}
{{- if not $.Values.checkpoints.store }}
{{- fail "checkpoints.existingSecret is for an object store: set checkpoints.store, or leave it out" }}
{{- end }}
envFrom:
  - secretRef:
      name: {{ . }}
{{- end }}
{{- end -}}

{{/* A password kept from the live Secret, or made. Takes root, secret, entry and made. */}}
{{- define "tinsmith.keep" -}}
{{- $live := lookup "v1" "Secret" .root.Release.Namespace .secret | default dict -}}
{{- index ($live.data | default dict) .entry | default (.made | b64enc) -}}
{{- end -}}
